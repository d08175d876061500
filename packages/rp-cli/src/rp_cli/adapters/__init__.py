"""Adapters, made by PEFT on a model in memory or on the meta device."""
