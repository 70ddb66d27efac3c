"""From files to a model that can be run; what a checkpoint holds; conversion."""
