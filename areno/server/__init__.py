"""An OpenAI-compatible HTTP server over one engine. `areno serve` runs it, and so do training sessions with agents."""
