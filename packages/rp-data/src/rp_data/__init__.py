"""Reads files for fine-tuning: rows, chats and images to tokens, sequences and the batches of any step.

The rooms: `rows` finds samples in files, `chat` and `images` are what tokens are made of beside plain text; the
other files make documents of samples, and batches of documents, which depend on the number of the step alone.
"""

from rp_data.batching.batches import Sequences, StepBatches
from rp_data.documents import Document, Documents, held_out
from rp_data.preferences import read_preferences
from rp_data.reading import Eyes, Manner, check_some, read_all
from rp_data.rows.documents import read_samples
from rp_data.samples import Chat, Completion, Sample, Text
from rp_data.tokens import Reader

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Completion",
    "Document",
    "Documents",
    "Eyes",
    "Manner",
    "Reader",
    "Sample",
    "Sequences",
    "StepBatches",
    "Text",
    "check_some",
    "held_out",
    "read_all",
    "read_preferences",
    "read_samples",
]
