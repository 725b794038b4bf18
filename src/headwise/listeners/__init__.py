"""Listeners: what each head of a model does while it runs, what happens without it, how to take it out.

Hearing a model, from `watch` to what it keeps, of a Hugging Face layer:
    capture.py                `watch.start` attaches a listener; `watch.stop` ends it
    adapters/__init__.py      `attach`: the one way in, for a while; the changes that are made to the model
    model_structure.py        paths, places of attention, which modules need a hook
    module_overrides.py       forwards and attributes of modules, overridden and put back
    adapters/huggingface.py   `answered` is called in place of a layer's own function, with its q, k and v
    adapters/attended.py      `attended`: attention on our engines, or the way of a layer before it
    active.py                 `announce`: a call, and who listens; which modules run now in each thread
    attachment.py             `Attachment.tell`: every listener's `hear`; `end` puts all back that was changed
    capture.py                `_Listener.hear`: what stays of a call
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
