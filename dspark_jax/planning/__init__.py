"""What a model needs on devices that this machine does not have."""
