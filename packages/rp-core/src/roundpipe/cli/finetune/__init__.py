"""`roundpipe train --model`: fine-tunes a model of the user's on data of the user's."""
