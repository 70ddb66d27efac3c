"""The model's mathematics, main model and drafter. No file is read here."""
