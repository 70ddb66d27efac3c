"""The parts of a layer, one file each."""
