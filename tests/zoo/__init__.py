"""One zoo of small models, for all tests.

families.py            the registry: a family, its published config, its sizes; tiny_config, served_config
published_configs.py   config.json of published models, for the matrix and the sizes of real models
sizes.py               short names of parallel sizes
tiny_models.py         transformers writes and computes them: save_model, train_hf_model, mtp_losses
megatron_models.py     Megatron holds them, on ranks: running, load_canonical, whole_weights
checkpoint_shapes.py   names, shapes and dtypes of a checkpoint on disk, for random ones
tokenizers.py          of numbers and of characters, with chat templates
workers.py             small jobs with both engines
"""
