"""Host memory: blocks of tensors, pinned pages, and pinned storages."""
