"""The corpus of scripts/build_corpus.py: its packages, and how each source's documents are read from them."""
