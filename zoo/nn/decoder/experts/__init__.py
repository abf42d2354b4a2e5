"""An MLP of experts: the router, the way of tokens to their experts and back, and the experts' products."""
