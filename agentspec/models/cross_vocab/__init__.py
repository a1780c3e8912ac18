"""Cross-vocabulary drafting: a draft model whose tokenizer is another than the target's (TLI, arXiv 2502.05202)."""
