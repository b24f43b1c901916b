"""The experts that a model chooses: kept while it decodes, used again and counted while it trains."""
