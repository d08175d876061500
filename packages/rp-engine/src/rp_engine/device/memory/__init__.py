"""What stays on a device beside a task's blocks: weights, graphs, FP8 codes; and strides and sizes of tensors."""
