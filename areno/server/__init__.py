"""An OpenAI-compatible HTTP server over one engine: the proxy of a rollout session, and `areno serve`."""
