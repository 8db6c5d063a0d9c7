"""What is not distributed: nothing in this package imports `torch.distributed`."""
