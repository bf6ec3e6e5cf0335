"""Finding, fetching, verifying and loading models and their tokenizers.

`resolve` turns the setting `model` into files on this machine without importing torch or transformers; `load` turns
those files into weights, a tokenizer and the facts that the core needs.
"""
