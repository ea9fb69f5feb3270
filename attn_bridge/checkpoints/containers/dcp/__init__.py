"""Distributed checkpoints of torch (DCP): folders of ``torch.distributed.checkpoint``, without torch."""
