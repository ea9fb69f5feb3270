"""What a difference has to do with the devices that share a side."""
