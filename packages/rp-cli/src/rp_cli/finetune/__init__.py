"""`roundpipe train --model`: fine-tune the user's model on the user's data."""
