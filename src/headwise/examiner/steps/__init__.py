"""Single steps of attention, each examined by itself: softmax, a split into heads, a mask, a block.

single_steps     which step a function is; builds, asks and judges it
own_softmax, arrangements, mask_functions, blocks   what each is asked, its right answers and its faults
wholes           what holds an attention: a block at work, functions of q and k
counterfactuals  a question, and which mistake explains the answers
"""
