"""One file for each model family: what `config.json` calls it, and how it differs from the others."""
