"""A small Transformer whose heads are sharded over several processes: train, watch, save, load.

torchrun --nproc-per-node 2 parallel_heads.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import headwise as hw


def model_of(seed):
    torch.manual_seed(seed)
    config = hw.models.TransformerConfig(
        vocab_size=61, d_model=32, num_heads=4, num_layers=2, rope=hw.nn.Rope()
    )
    return hw.models.Transformer(config)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    model = hw.parallel.shard_heads(model_of(seed=0).to(device), mesh)  # the one line
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after it: parameters are DTensors now

    ids = torch.arange(4 * 23, device=device).view(4, 23) * 7 % 61  # every rank reads the same
    for _ in range(20):
        optimiser.zero_grad()
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        hw.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    with torch.no_grad(), hw.watch(model) as heads:  # on every rank; all heads on every rank
        model(ids)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
    other = hw.parallel.shard_heads(model_of(seed=1).to(device), mesh)
    state = {"model": get_model_state_dict(other)}
    checkpoint.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state["model"])

    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, {heads}")
    print(f"rank {dist.get_rank()}: {model.decoder.layers[0].attention.local_heads}")
    assert torch.equal(other(ids), model(ids))


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.barrier()  # no rank leaves while another one still talks to it
    dist.destroy_process_group()
