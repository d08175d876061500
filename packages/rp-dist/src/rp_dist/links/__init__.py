"""Links between machines: who may open one, what proves each message, and what a message may hold."""
