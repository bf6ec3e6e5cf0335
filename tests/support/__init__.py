"""What tests share: tiny models, references, formats. Importable as `support`, by the setting `pythonpath` of pytest."""
