"""What all Talaria services share: wire messages, subjects, errors, bus, clock, config, telemetry."""
