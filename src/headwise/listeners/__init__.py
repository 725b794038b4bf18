"""Listeners: what each head of a model does while it runs, what happens without it, how to take it out.

Hearing a model:
    model_door.py         `attach`: the one way in, for a while
    attachment.py         a model and those who listen to it
    active.py             one call as it is heard, who listens, what runs now
    split_calls.py        calls of layers whose heads lie over several processes
    model_structure.py    paths, places of attention, which modules need a hook
    module_overrides.py   what is overridden in a module meanwhile, and put back at the end
    adapters/             how each family's attention is heard
Listening to it:
    capture.py            `watch`
    chosen_heads.py       which heads a user means, and the block in which they are heard or changed
    ablation.py           `ablate`, `head_means`; heads off and on again between runs
    head_outputs.py       `collect`, `patch`; what heads write by W_O
    importance.py         `importance`, `robustness`: the loss without heads
    effects.py model_answers.py    `effects`, `role_effects`: a model's answers without heads
    role_measurement.py   `roles`, `retrieval_scores`
    monitor.py measured_step.py    `Monitor`, `trainer_callback`: heads in training
Changing it:
    pruning.py            `prune`, `load_pruned`
"""
