"""Small models for all tests.

families.py            families with published configs and sizes; tiny_config, served_config;
                       short names of parallel sizes
published_configs.*    config.json of published models, for the matrix and for sizes of real models
tiny_models.py         models in transformers: save_model, train_by_torch, mtp_losses
megatron_models.py     models in Megatron, on ranks: running, load_canonical, whole_weights
checkpoint_shapes.py   names, shapes and dtypes of a checkpoint on disk, to write random ones
tokenizers.py          tokenizers of numbers and of characters, with chat templates
workers.py             small jobs with both engines
"""
