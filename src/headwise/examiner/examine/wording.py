"""What a name says: which size a constructor's parameter wants, which input a forward's."""

from __future__ import annotations

import re

__all__ = ["bare", "input_word", "role_word", "size_word"]

_WIDTH = frozenset(
    """dmodel embeddim embdim emb embed embedsize embedingdim embeddingdim embeddingsize embsize embedding
    hiddensize hiddendim hidden hid hiddim dim nembd nembed din dout d model modeldim modelsize units
    numhiddens numhidden features infeatures outfeatures inputdim outputdim indim outdim querydim keydim
    valuedim qdim kdim vdim keysize querysize valuesize channels inchannels outchannels width nstate
    nfeat nfeatures dimin dimout dmodels ndim dinput doutput size hiddenunits dembed dembd dembedding
    nemb nhidden nhid inputsize outputsize tokendim latentdim nunits c crossdim contextdim featuredim
    featdim dimmodel dims statedim attndim attentiondim dattn dimension ndims innerdim embeds nmodel
    wordsize embeddingdimension embeddim_ hdim dhidden""".split()
)
_HEADS = frozenset(
    """h heads nhead nheads numheads numberofheads numattentionheads head numhead nattnheads headnum headsnum
    headcount attentionheads nh noheads numheadsattention nattentionheads attnheads headcounts
    numofheads headnumber amountheads numqueryheads nqheads numqheads""".split()
)
_KEY_HEADS = frozenset(
    "numkvheads nkvheads numkeyvalueheads kvheads nkvhead nkeyvalueheads numkvhead".split()
)
_HEAD_DIM = frozenset(
    """headdim headsize dhead dimhead dk dv dq dkey dvalue dquery sizeperhead headwidth dimperhead
    attentionheadsize kqdim headdims dimheads dimk dimv kdimperhead headhiddensize perheaddim headembd
    qkdim vheaddim""".split()
)
_LENGTH = frozenset(
    """blocksize maxlen contextlength maxseqlen seqlen seqlength ctxlen nctx maxlength maxpositionembeddings
    contextsize contextwindow windowsize sequencelength length npositions maxsequencelength ctx
    contextlen maxposition block maxcontext numtokens maxseqlength maxseq contextlengths maxtokens
    ncontext seqmax maxsequence maxsequencelen""".split()
)
_QUERY = frozenset(
    """q query queries xq qx qinput inputq queryinput inputquery qin querystates tgt target querytensor xquery
    queryinputs inqueries inq qseq queryseq qs""".split()
)
_KEY = frozenset(
    """k key keys xk kx kinput inputk keyinput inputkey kin keystates keytensor xkey inkeys ink kseq
    ks""".split()
)
_VALUE = frozenset(
    """v value values val vals xv vx vinput inputv valueinput inputvalue vin valuestates valuetensor xvalue
    invalues inv vseq vs""".split()
)
_X = frozenset(
    """x input inputs hiddenstates hidden hiddenstate embeddings embedding emb tokens sequence seq inp h src
    features feats xin data states embeds inputsembeds inputembeds infeatures tensor z e feat
    inputtensor inputsequence xs tokenembeddings tokenembds embedded inputembeddings sequences
    representations""".split()
)
_MEMORY = frozenset(
    """context memory mem encoderoutput encoderoutputs encoutput encoutputs encout keyvaluestates kv y cond
    xkv encoderhiddenstates source encoder cross crossinput other keyvalue contextstates enc encx xenc
    kvinput crossstates conditioning ctx xkeyvalue keyvalueinput kvstates encoderhidden encoderstates
    xcontext hiddenkv xb inputkv xmem encoderstate crossattentionstates""".split()
)


def bare(name: str) -> str:
    """Letters alone, small: d_model, dModel and D_MODEL are dmodel."""
    return re.sub(r"[^a-z]", "", name.lower())


def size_word(name: str) -> str | None:
    """What a constructor's parameter, or a field of a configuration, stands for."""
    word = bare(name)
    if "drop" in word or word in {"p", "attnpdrop", "pdrop"}:
        return "dropout"
    if word in {"batchfirst"}:
        return "batch first"
    if "bias" in word:
        return "bias"
    if word in {"device", "dtype"}:
        return word
    tables = (
        ("key heads", _KEY_HEADS),
        ("heads", _HEADS),
        ("head dim", _HEAD_DIM),
        ("length", _LENGTH),
        ("width", _WIDTH),
    )
    for meaning, words in tables:
        if word in words:
            return meaning
    if word in {
        "config",
        "cfg",
        "conf",
        "args",
        "hparams",
        "params",
        "opt",
        "opts",
        "options",
        "modelargs",
        "hp",
    }:
        return "config"
    if word.endswith(("config", "cfg")):
        return "config"
    if word in {"batchsize", "bs", "batch"}:
        return "batch"
    if "causal" in word or word in {"mask", "masked", "usemask", "ismasked", "autoregressive", "isdecoder"}:
        return "causal"
    if "layer" in word and ("id" in word or "num" in word or "n" == word[:1]):
        return "layer"
    if "vocab" in word:
        return "vocabulary"
    if "eps" in word:
        return "epsilon"
    if "theta" in word or "ropebase" in word:
        return "theta"
    if word in {"temperature", "temp", "sqrtdk"}:
        return "temperature"
    if word in {"scale", "scaling", "scalefactor", "qkscale", "softmaxscale"}:
        return "scale"
    if word.startswith(("use", "is", "has", "return", "output", "need")) or "flash" in word:
        return "flag"
    if word.startswith(("num", "n")) and "head" in word:
        return "heads"
    return None


def input_word(name: str) -> str | None:
    """Which of forward's inputs a parameter is: query, key, value, x, memory, mask, lengths."""
    word = bare(name)
    if "validlen" in word or word in {"lengths", "lens", "keylengths", "seqlens", "sequencelengths"}:
        return "lengths"
    if word in {"headmask", "layerheadmask"}:
        return None
    if "mask" in word or word in {"pad", "padding", "bias", "attnbias", "attentionbias", "m"}:
        return "mask"
    tables = (("query", _QUERY), ("key", _KEY), ("value", _VALUE), ("x", _X), ("memory", _MEMORY))
    for meaning, words in tables:
        if word in words:
            return meaning
    return None


_AROUND = (
    r"(?:weights?|kernel|matrix|mat|linear|lin|projections?|project|proj|transform|layers?|dense|fc|to|nets?|w|c|self|"
    r"attn|attention|mha|multihead|heads?|embeddings?|embed|map|params?|bias|b|states?|input|in|vectors?|mlp|conv|all)*"
)
_CORES = {
    "qkv": r"qkvs?|querykeyvalue|querieskeysvalues|kqv|qvk|vkq|kvq|vqk",
    "kv": r"kvs?|keyvalue",
    "qk": r"qk|querykey",
    "q": r"q|qs|query|queries|querys|que",
    "k": r"k|ks|key|keys",
    "v": r"v|vs|val|vals|value|values",
    "o": r"o|os|out|outs|output|concat|concatenate|unify|unified|combine|combiner|merge|final|wo|mixer|join",
}
_ROLES = {role: re.compile(f"{_AROUND}(?:{core}){_AROUND}") for role, core in _CORES.items()}


def role_word(name: str) -> str | None:
    """Which projection one part of a parameter's path names: q, k, v, o, qkv, kv, qk."""
    word = bare(name)
    if word in {"cattn", "inproj", "inprojweight", "inprojbias"}:
        return "qkv"
    return next((role for role, pattern in _ROLES.items() if pattern.fullmatch(word)), None)
