"""Listeners: what each head of a model does while it runs, what happens without it, how to take it out.

Hearing a model:
    model_door.py         `attach`: the one way in, for a while
    attachment.py         a model and those who listen to it
    active.py             one call as it is heard, who listens, what runs now
    model_structure.py    paths, places of attention, which modules need a hook
    adapters/             how each family's attention is heard
    module_hooks.py       how a model is changed meanwhile, and changed back
Listening to it:
    capture.py            `watch`
    chosen_heads.py       which heads a user means
    ablation.py           `ablate`, `head_means`
    head_outputs.py       `collect`, `patch`
    example_counts.py     how many examples are in a batch
    effects.py            `effects`: a model's answer without each head
    model_answers.py      what a model answers, to inputs and to prompts
    importance.py robustness.py retrieval.py role_measurement.py
    role_effects.py       behaviours without the heads of a role
    monitor.py measured_step.py trainer_callback.py     heads in training, and alarms
Changing it:
    pruning.py prunable_families.py    `prune`, `load_pruned`
"""
