"""The front doors: HTTP (OpenAI API) and NATS; validation, identity, retries, delivery."""
