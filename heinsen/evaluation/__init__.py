"""Losses over splits and documents, recall probes, and the lm-evaluation-harness."""
