"""Opening: machines find each other, link up, and open gloo's groups; those that do not come are named."""
