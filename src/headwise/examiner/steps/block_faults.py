"""What can be wrong with a Transformer block."""

from __future__ import annotations

from .counterfactuals import StepFault

STEP = "block"
PRE = "x = x + attention(norm1(x)); x = x + feed_forward(norm2(x))"
JOINS = (r"\+=|=\s*\w+\s*\+|return\s+\w+\s*\+|return|\+",)


def _fault(
    key: str, title: str, formula: str, hints: tuple[str, str, str], why: str, repair: str,
    lines: tuple[str, ...] = JOINS, remark: bool = False, right: str = PRE,
) -> StepFault:  # fmt: skip
    return StepFault(key, title, formula, right, hints, why, repair, lines=lines, remark=remark, of=STEP)


RESIDUAL = "Without the way around it, what went in is lost, and gradients of deep stacks fade."
ATTENTION_LINES = (r"=\s*self\.\w*(att|sa\b|mha)\w*\(", r"self\.\w*(att|sa\b|mha)", r"return")
FEED_LINES = (
    r"=\s*self\.\w*(ff|feed|mlp|linear2|fc2)\w*\(",
    r"self\.\w*(ff|feed|mlp|linear2|fc2)",
    r"return",
)
FAULTS = [
    _fault(
        "no residual around attention",
        "what went into the attention is not added to what comes out of it",
        "x = attention(norm1(x))",
        (
            "Set the attention's output to zero: what is left of x?",
            "Nothing is: x only goes on through the attention.",
            "x = x + attention(...).",
        ),
        RESIDUAL, "x = x + self.attention(self.norm1(x))", ATTENTION_LINES,
    ),
    _fault(
        "no residual around feed-forward",
        "what went into the feed-forward is not added to what comes out of it",
        "x = feed_forward(norm2(x))",
        (
            "Set the feed-forward's output to zero: what is left of x?",
            "Nothing is: x only goes on through the feed-forward.",
            "x = x + feed_forward(...).",
        ),
        RESIDUAL, "x = x + self.feed_forward(self.norm2(x))", FEED_LINES,
    ),
    _fault(
        "residual from the wrong place",
        "what is added to a part's output is not what the block had before that part",
        "norm(x) + part(norm(x)), or x + feed_forward(..) with the block's input x",
        (
            "Which tensor is added to the output of each part?",
            "It is the normalised one, or the block's input where the attention's result should be.",
            "Keep x as it runs: x = x + part(norm(x)), for each part in turn.",
        ),
        "The stream is broken: what an earlier part wrote is dropped, or rescaled in every block.",
        "x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm missing in the block",
        "one part of the block has a norm, another has none",
        "x + attention(norm1(x)), then x + feed_forward(x)",
        (
            "Count the norms, and count the parts.",
            "A norm is missing, or is made and never called.",
            "Give each part a norm of its own, in the same place.",
        ),
        "Numbers grow from block to block where nothing brings them back to one size.",
        "x = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "norm over the wrong axis",
        "the norm takes mean and spread over another axis than the last",
        "(x - x.mean(1)) / x.std(1)",
        (
            "Take the mean of the norm's output over its last axis: is it 0?",
            "It is 0 over another axis.",
            "A layer norm is over the channels of each position: dim=-1, or LayerNorm(d_model).",
        ),
        "Positions, or samples, then depend on one another: the future leaks through the norm.",
        "mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)",
        (r"mean\(|std\(|var\(", r"Norm\("),
        right="(x - x.mean(-1)) / x.std(-1)",
    ),
    _fault(
        "feed-forward without activation",
        "between the two layers of the feed-forward there is nothing: two linear layers are one",
        "linear2(linear1(x))",
        (
            "What is the product of two matrices?",
            "Another matrix: without an activation between, two layers do what one does.",
            "linear2(relu(linear1(x))).",
        ),
        "The block has no other place to compute something that is not linear in a position.",
        "x = self.linear2(F.relu(self.linear1(x)))",
        (r"linear_?2|fc_?2|Linear\(", r"Sequential\("),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "activation after the feed-forward",
        "there is an activation after the last layer of the feed-forward",
        "relu(linear2(..))",
        (
            "Can the feed-forward's output be negative?",
            "An activation cuts it off after the last layer.",
            "The activation belongs between the two layers alone.",
        ),
        "Each block can only add to the stream, never take away.",
        "x = self.linear2(F.relu(self.linear1(x)))",
        (r"(relu|gelu|silu|act\w*)\(\s*self\.\w*2", r"ReLU|GELU|SiLU|relu|gelu|silu"),
        right="linear2(relu(linear1(x)))",
    ),
    _fault(
        "feed-forward before attention",
        "the feed-forward comes first, the attention after it",
        "x = x + feed_forward(norm1(x)); x = x + attention(norm2(x))",
        (
            "In which order are the two parts called?",
            "The feed-forward is called before the attention.",
            "Attention first, then feed-forward.",
        ),
        "A stack of such blocks is shifted by half a block: weights of others do not fit, and the last "
        "attention is never worked on.",
        "x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))",
    ),
    _fault(
        "queries from the memory",
        "cross-attention takes its queries from the memory, and keys and values from the decoder",
        "cross_attention(memory, x, x)",
        (
            "How long is the output of cross-attention: as long as x, or as the memory?",
            "There is one output for each query: queries come from x.",
            "cross_attention(x, memory, memory).",
        ),
        "The decoder asks, the encoder answers: queries from x, keys and values from the memory.",
        "x = x + self.cross_attention(self.norm2(x), memory, memory)",
        (r"(cross|src|enc|memory)\w*\(.*(memory|enc)", r"(memory|enc\w*)"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "memory not used",
        "no part of the block is given the memory: there is self-attention alone",
        "cross_attention(x, x, x)",
        (
            "Change the memory: does the output change?",
            "Nothing reads it.",
            "cross_attention(x, memory, memory).",
        ),
        "The decoder never sees what is to be decoded.",
        "x = x + self.cross_attention(self.norm2(x), memory, memory)",
        (r"(cross|src|enc)\w*\(", r"memory|enc"),
        right="cross_attention(x, memory, memory)",
    ),
    _fault(
        "one norm for two parts",
        "one norm, with one set of weights, is used in two places",
        "norm(x) before attention and before feed-forward",
        (
            "How many norms are made in __init__?",
            "The same one is called twice.",
            "Make two: norm1 and norm2.",
        ),
        "It computes; but both parts share one scale and one shift.",
        "self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)",
        (r"Norm\(", r"norm"), remark=True,
    ),
    _fault(
        "block without norms",
        "there is no norm in the block",
        "x + attention(x); x + feed_forward(x)",
        (
            "How large are the numbers after ten such blocks?",
            "Each block adds to them, and nothing brings them back to one size.",
            "x = x + part(norm(x)), with a norm for each part.",
        ),
        "One block works; deep stacks of them are hard to train.",
        "x = x + self.attention(self.norm1(x))\nx = x + self.feed_forward(self.norm2(x))", remark=True,
    ),
]  # fmt: skip
BY_KEY = {fault.key: fault for fault in FAULTS}
