"""What comes after training: adapters merged into their models, and models in the formats of others."""
