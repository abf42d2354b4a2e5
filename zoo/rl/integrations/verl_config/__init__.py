"""Groups of verl's settings that Hydra finds by `hydra.searchpath=[pkg://zoo.rl.integrations.verl_config]`: `model_engine=zoo`."""
