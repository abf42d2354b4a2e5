"""AdamW's update of flat tensors on compact state: in plain PyTorch, and in one kernel."""
