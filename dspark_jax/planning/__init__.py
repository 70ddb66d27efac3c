"""What a model needs on devices that are not at hand."""
