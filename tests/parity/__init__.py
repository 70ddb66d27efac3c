"""This library against Hugging Face transformers' DeepseekV4: `make parity`.

storage.py              the official storage formats in numpy, independent of the library
convert.py              Hugging Face weights <-> official tensors
hf.py                   random Hugging Face models and their forwards
patterns.py             the tiny configs and prompt lengths that are compared
test_parity_convert.py  proves the above on the golden checkpoint, without the library
test_parity.py          the comparison
"""
