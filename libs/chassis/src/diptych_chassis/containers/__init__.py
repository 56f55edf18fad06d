"""What containers run beside a service: keys are made, identities issued, streams created."""
