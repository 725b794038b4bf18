"""What is attention for?

idea: a word often means little by itself; attention lets it collect what it needs from the other words
minutes: 10
level: beginner
"""

# %% [markdown]
# Read this text and guess its next word:
#
# > The captain read the letter. Then the captain read the …
#
# You probably thought of "letter". The last word, "the", did not tell you: almost any noun can follow it. You
# looked back and used other words: what was it that the captain read? **Attention** is the part of a language
# model that looks back in this way.
#
# This lesson shows it in **mini**, the small language model inside headwise. It needs no mathematics. You can
# skip the code: what it prints is below it, and the text explains it.
#
# ## A text becomes tokens, and tokens become numbers
# A model has a fixed list of words and pieces of words, its **tokens**. It cuts a text into tokens and looks
# up a list of numbers for each of them, the token's **vector**.

# %% slide: Guess the next word
# > The captain read the letter. Then the captain read the …
#
# - Write your guess on paper.
# - Which earlier words did you use?
#
# ---
# Give half a minute, without an answer. Collect a few guesses, and the words that they were based on. Then
# cover all but the last word, "the": could anybody guess from it alone?

# %% slide: The answer: you looked back
# - You probably thought of **letter**.
# - The last word, "the", did not tell you: almost any noun can follow it.
# - You looked back and used other words: what was it that the captain read?
# - **Attention** is the part of a language model that looks back in this way.
#
# ---
# Ask who looked at "read", and who at "letter". A model has to do the same with numbers. The rest of the
# session is about how.

# %% slide: A text becomes tokens, a token becomes numbers
# - A model has a fixed list of words and pieces of words, its **tokens**. It cuts every text into them.
# - For each token it looks up a list of numbers, the token's **vector**.
# - **mini**, the small model of this course: 8,192 tokens, 224 numbers for each.
# - The last "the" has exactly the numbers of the "the" before "letter". They say nothing about letters.
#
# ---
# Our text has 12 tokens: 10 words and a full stop, and before them a mark for the beginning of the text,
# which every text gets. Ask: if both "the" have the same numbers, how can a model know what follows the
# second?

# %%
import torch

import headwise as hw

model, tokenizer, _ = hw.models.load("mini")
text = "The captain read the letter. Then the captain read the"
ids = tokenizer(text, return_tensors="pt")["input_ids"]  # [B=1, T=12]
tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
vectors = model.embedding.tokens.weight[ids[0]]  # [T=12, E=224]: looked up, one row for each token
print(" | ".join(tokens))
print(
    f"{len(tokens)} tokens, out of a list of {model.config.vocab_size:,}; {vectors.shape[1]} numbers for each"
)
assert torch.equal(vectors[4], vectors[11]) and torch.equal(vectors[2], vectors[9])

# %% [markdown]
# `<|start|>` marks the beginning; every text that mini reads begins with it.
#
# The vector of a token is the same wherever the token stands: the last "the" has exactly the numbers of the
# "the" before "letter". They say nothing about captains or letters.
#
# ## Why a word needs the others
# mini computes how probable each token of its list is as the next one. It does so from the numbers at the
# *last* token. We compare three texts that all end with the same token:

# %% slide: The prediction depends on the words before
# | text | what mini predicts |
# |---|---|
# | The captain read the **letter**. Then the captain read the … | letter, 78% |
# | The captain read the **news**. Then the captain read the … | news, 92% |
# | the … | same, 2%: no token gets more |
#
# - All three texts end with the same token, "the", with the same numbers.
# - What the last token needs is at another token. **Attention** brings it there.
# - It is the only part of the model in which tokens exchange anything.
#
# ---
# Cover the right column and let the group guess each percentage. The third row is the contrast: with "the"
# alone, the best guess is hardly better than the next.


# %%
def next_tokens(text: str) -> list[tuple[str, float]]:
    """The three most probable next tokens, with their probabilities."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = model(ids)[0, -1].softmax(dim=-1).topk(3)
    return list(
        zip(tokenizer.convert_ids_to_tokens(best.indices.tolist()), best.values.tolist(), strict=True)
    )


for start in (text, text.replace("letter", "news"), " the"):
    guesses = ", ".join(f"{token} {probability:.0%}" for token, probability in next_tokens(start))
    print(f"{start.strip()} ...\n    {guesses}")
assert [next_tokens(text)[0][0], next_tokens(text.replace("letter", "news"))[0][0]] == ["letter", "news"]

# %% [markdown]
# With the whole text, mini predicts "letter" with 78%. If one earlier word is replaced, the prediction follows
# it: "news", 92%. From "the" alone mini cannot know: no token gets more than 2%.
#
# So what the last token needs is at another token, and has to be brought to it. Attention does that. It is the
# only part of the model in which tokens exchange anything; every other part works on each token by itself.
#
# ## The party
# How does a token know which other tokens to listen to? Imagine a party. You want to hear of a good jazz
# club, and forty people talk at the same time.
#
# - What you want to know is your **query**: "who can recommend a jazz club?"
# - What a guest is known for is that guest's **key**: this one plays the saxophone, that one owns a bar, the
#   next one talks about football.
# - What a guest says is the **value**: "try the Blue Door, on a Thursday".
#
# You compare your query with the key of every guest. The better a key fits, the more you listen to that
# guest: more than half of your attention goes to the saxophone player, a good part to the owner of the bar, a
# little to everybody else. These shares of your attention are the **weights**; they sum to 1. What you take
# home is a mixture of what all guests said, each in proportion to its weight.
#
# Key and value are two things: you choose guests by what they are known for, and you learn what they say.
#
# In a text, every token is a guest, and every token has a query of its own at the same time. Such a
# comparison of queries with keys, with its mixture of values, is called a **head**. Written in words:
#
# | | at the party | in our text |
# |---|---|---|
# | query | who can recommend a jazz club? | the last "the": what followed "read the" the last time? |
# | key | plays the saxophone | the token "letter": I followed "read the" |
# | value | "try the Blue Door" | "letter" |
# | weight | how much you listen to this guest | how much the last "the" takes from "letter" |
#
# ## One head of mini
# mini has 8 layers, one after another, with 7 heads each. Head 5.2 (layer 5, head 2, both counted from 0) does
# what the table says. Here are its weights:

# %% slide: A party: query, key, value
# You want to hear of a good jazz club, and forty people talk at the same time.
#
# | | at the party | in our text |
# |---|---|---|
# | **query** | who can recommend a jazz club? | the last "the": what followed "read the" the last time? |
# | **key** | plays the saxophone | the token "letter": I followed "read the" |
# | **value** | "try the Blue Door" | "letter" |
#
# - You choose guests by what they are known for, and you learn what they say: key and value are two things.
#
# ---
# Play it: a learner asks, three others have a card with a key on the front and a value on the back. Whom do
# you listen to, before you have heard a word? That is why a key is needed.

# %% slide: Weights, a mixture, a head
# - You compare your query with the key of every guest. The better a key fits, the larger the **weight** of
#   that guest: how much you listen.
# - The weights of a query **sum to 1**.
# - What you take home is a **mixture** of all values, each in proportion to its weight.
# - A **head** is such a comparison of queries with keys, with its mixture of values.
# - In a text every token is a guest, and every token has a query of its own at the same time.
#
# ---
# More than half of your attention goes to the saxophone player, a good part to the owner of the bar, a little
# to everybody else. Ask: what happens to the other weights if another saxophone player comes in? They become
# smaller, because the sum stays 1.

# %% slide: One head of mini: head 5.2
# - A row: a token that asks. A column: a token that answers. Darker: a larger weight.
# - The last row: "the" has 56% of its weight on "letter".
# - mini may only look back, so the upper right half is empty.
#
# [picture]
#
# ---
# Head 5.2 is in layer 5, number 2 of that layer, both counted from 0. Ask each learner to point at the
# largest weight of the last row, then of the row above: "read" looks at the "the" that followed it before.

# %%
with torch.no_grad(), hw.watch(model, tokenizer=tokenizer, keep=True) as heads:
    model(ids)
weights = heads[5].map.dense()[0, 2]  # [T, T]: a row for each token that asks, a column for each that answers
print(f"rows 0 to 7: {weights[:8, 0].min():.0%} or more on {tokens[0]}")
for t in (8, 9, 10, 11):  # "the captain read the", the second time
    best = weights[t].topk(2)
    places = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    print(f"{tokens[t]:8} ->", ", ".join(f"{tokens[place]} {weight:.0%}" for place, weight in places))
print(f"all {len(tokens)} weights of the last row: sum {weights[-1].sum():.2f}")
assert weights[11].argmax() == 5 and weights[10].argmax() == 4 and weights[:8, 0].min() > 0.9
assert all(tokens[t] not in tokens[:t] for t in range(8))  # these tokens occur for the first time
heads.plot(5, 2, text=text)

# %% [markdown]
# A row belongs to a token that asks, a column to a token that answers; the darker, the larger the weight. The
# upper right half is empty, because mini may only look back. In the last row, "the" has 56% of its weight on
# "letter". In the two rows above, "read" attends to the "the" that followed it before (57%), and "captain", a
# little, to "read" (19%).
#
# The other rows have most of their weight on the first token: 97% or more where a token occurs for the first
# time, 83% in the row of the "the" before the second "captain", 80% in that of the second "captain". A head
# that puts most of its weight on the first token is called a *sink*; this is why the picture's heading says so.
# Head 5.2 attends to the first token as long as no token occurs again. Where one does, it can attend to the
# token that followed it the last time.

# %% slide: Most rows rest on the first token
# - The first token is a mark for the beginning of the text.
# - Where a token occurs for the first time, it gets 97% of the weight or more; in the last row 41%.
# - A head that puts most of its weight on the first token is called a **sink**.
# - As long as no token occurs again, head 5.2 attends to the first token. Where one does, it can attend to
#   the token that followed it the last time.
#
# ---
# Point at the dark column on the left of the picture before this slide. The sum must be 1, also where no key
# fits; the rest has to go somewhere.

# %% page: The captain read the letter. Then the captain read the#layer=5&head=2&token=11

# %% [markdown]
# Why "letter", and not "captain"? The second "captain" followed a "the", too: "Then the captain". But the
# token before that "the" was not "read". We replace the last "read" by "saw", so that no earlier token followed
# the same two tokens:

# %% slide: Why "letter", and not "captain"?
# | the text ends with | weight on "letter" | on the first token |
# |---|---:|---:|
# | … captain **read** the | 56% | 41% |
# | … captain **saw** the | 4% | 85% |
#
# - The second "captain" followed a "the", too. But only "letter" followed both "read" and "the".
# - So the query of head 5.2 is not about the last token alone.
#
# ---
# Ask for a guess before you show the second row: the last token is the same, will the weight be the same?

# %%
for ending in (text, text.removesuffix("read the") + "saw the"):
    changed = tokenizer(ending, return_tensors="pt")["input_ids"]
    with torch.no_grad(), hw.watch(model, keep=True) as others:
        model(changed)
    last = others[5].map.dense()[0, 2, -1]  # [T=12]: head 5.2, the last "the"
    print(
        f"... {' '.join(ending.split()[-3:])}: {last[5]:.0%} on letter, {last[2]:.0%} and {last[9]:.0%} on "
        f"the two captains, {last[0]:.0%} on {tokens[0]}"
    )
assert last[5] < 0.1 and last[0] > 0.8

# %% [markdown]
# With "saw the" at the end, the weight on "letter" falls from 56% to 4%, about as much as on each "captain".
# So the query of head 5.2 is not about the last token alone. With "read the" at the end, the key of "letter"
# fits better than that of "captain", because "letter" followed both of these tokens.
#
# ## Where the picture of the party misleads
# - **Nobody tells a head what to ask.** Queries, keys and values are not sentences but lists of numbers. The
#   model computes them from the vectors of the tokens, and training finds out how. The words in the table
#   above are our reading of what head 5.2 does; most heads do something for which we have no words.
# - **The weights sum to 1 even if no key fits.** At a party you could leave. Head 5.2 then puts its weight on
#   `<|start|>`: 41% in the last row, and nearly all in the rows of tokens that occur for the first time. This
#   does not mean that `<|start|>` matters to them.
# - **A party has one round, a model has several.** All tokens ask at the same time, in all 7 heads of a
#   layer, and each layer works with what the layers before have collected. How could "letter" be known for "I
#   followed 'read the'"? Earlier heads have brought that to it, above all head 3.4, which attends to the
#   token just before.
# - **A large weight does not show that the head is needed.** To find out, switch the head off.
#
# The last two points can be measured. We switch off one head at a time and look at the probability of
# "letter" again:

# %% slide: Where the picture of the party misleads
# - **Nobody tells a head what to ask.** Queries, keys and values are lists of numbers; training finds out how
#   to compute them. The words of the party are our reading.
# - **The weights sum to 1 even if no key fits.** At a party you could leave; head 5.2 puts its weight on the
#   first token, whether it matters or not.
# - **A party has one round, a model has several.** Each of mini's 8 layers works with what the layers before
#   have collected. Earlier heads brought "I followed 'read the'" to "letter".
# - **A large weight does not show that the head is needed.** To find out, switch the head off.
#
# ---
# The last two can be measured. Before the next slide, ask which head mini needs more for "letter": head 5.3,
# which has 81% of its weight on "letter", or head 3.4, which has 0% there?

# %%
letter = ids[0, 5]
print("switched off  probability of 'letter'  weight of 5.2 on 'letter'")
probability, remaining = {}, {}
for off in (None, (5, 2), (3, 4), (5, 3)):
    with torch.no_grad(), hw.ablate(model, [off] if off else []), hw.watch(model, keep=True) as others:
        probability[off] = model(ids)[0, -1].softmax(dim=-1)[letter].item()
    remaining[off] = others[5].map.dense()[0, 2, -1, 5].item()
    name = f"head {off[0]}.{off[1]}" if off else "no head"
    print(f"{name:12} {probability[off]:13.0%} {'' if off == (5, 2) else f'{remaining[off]:.0%}':>24}")
print(f"weights with all heads on: head 3.4 from 'letter' to 'the': {heads[3].map.dense()[0, 4, 5, 4]:.0%},")
print(f"    from the last 'the' to 'letter': head 3.4 {heads[3].map.dense()[0, 4, -1, 5]:.0%}, ", end="")
print(f"head 5.3 {heads[5].map.dense()[0, 3, -1, 5]:.0%}")
assert probability[3, 4] < probability[5, 2] < probability[5, 3] < probability[None]

# %% [markdown]
# Without head 5.2 the probability of "letter" falls from 78% to 47%. Without head 3.4 it falls to 15%, although
# head 3.4 does not attend from the last "the" to "letter" at all. It does its part earlier, at "letter": 98% of
# its weight there is on the "the" before. Without it, head 5.2 no longer recognises "letter", and its weight on
# it falls from 56% to 13%. Head 5.3 has a larger weight on "letter" than head 5.2, 81%, and without it the
# probability falls only to 73%.
#
# One question is open: how does a model compute "how well a key fits a query"? With one number, the dot
# product. It is lesson 1, and it starts with the query and the keys of head 5.2 in this text.

# %% slide: Without head 3.4: 15%
# | switched off | its weight from the last "the" on "letter" | probability of "letter" |
# |---|---:|---:|
# | no head | | 78% |
# | head 5.3 | 81% | 73% |
# | head 5.2 | 56% | 47% |
# | head 3.4 | 0% | **15%** |
#
# - Head 3.4 does its part earlier: at "letter", 98% of its weight is on the "the" before.
# - Without it, head 5.2 no longer recognises "letter": its weight on it falls from 56% to 13%.
#
# ---
# Whoever guessed head 5.3 was in good company: the weights suggest it. What a head attends to is a
# measurement, what a model needs is another. The open question for lesson 1: how is "fits" computed?

# %% question: Query, key and value: which two are compared with each other, and which one is passed on?
# The query of the token that asks is compared with the key of every token; this decides the weights. The
# values are passed on, mixed in proportion to the weights. So a token can be chosen by one property and pass
# on another: at a party, you choose a guest because she plays the saxophone, and learn the name of a club.

# %% question: In some head, a token has 41% of its weight on the first token of the text. Does the model need the first token for its prediction?
# The weight does not tell. Weights must sum to 1, and many heads put the part that fits nowhere else on the
# first token. Whether a prediction depends on something is measured by a change: replace a word or switch the
# head off, and look at the probability. In lesson 0, head 5.3 has 81% of its weight on "letter"; without that
# head the probability of "letter" falls only from 78% to 73%.
