"""What a process runs on: compiler options, the mesh and its collectives, several processes,
Ctrl-C.
"""
