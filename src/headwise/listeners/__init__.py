"""Listeners: measure what each head of a model does while it runs, switch heads off, and remove them.

How a Hugging Face layer is heard, from `watch` to the record that is stored:
    capture.py                `watch.start` attaches a listener; `watch.stop` ends it
    adapters/__init__.py      `attach`, which every listener uses; the changes that are made to the model
    model_structure.py        paths, places of attention, which modules need a hook
    module_overrides.py       forwards and attributes of modules, overridden and restored
    adapters/huggingface.py   `attend_for` is called in place of a layer's function, with its q, k and v
    adapters/attended.py      `attended`: attention on headwise's engines, or by the plan of an earlier call
    active.py                 `announce`: calls and listeners; which modules are running in each thread
    attachment.py             `Attachment.tell` calls every listener's `hear`; `end` undoes every change
    capture.py                `_Listener.hear` stores the record of a call
Listeners:
    capture.py            `watch`
    chosen_heads.py       the heads that a user chooses, and the block in which they are heard or changed
    ablation.py           `ablate`, `head_means`; heads switched off and on between runs
    head_outputs.py       `collect`, `patch`; what heads write by W_O
    importance.py         `importance`, `robustness`: the loss without heads
    effects.py model_outputs.py    `effects`, `role_effects`: a model's output without heads
    role_measurement.py   `roles`, `retrieval_scores`
    monitor.py measured_step.py    `Monitor`, `trainer_callback`: heads in training
Changes of a model:
    pruning.py            `prune`, `load_pruned`
"""
