"""Meanings of names and comments: sizes, inputs and projections by name, and the meaning of a mask.

Names only propose, numbers decide. Only the intended meaning of a mask is taken from words, since numbers
cannot decide it: a module that hides keys where its mask is 1 is right if its documentation says so.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from typing import Any

from ..source.parsed import DEFINITIONS, nodes, readable, segment, source_of_definition, tree_of

FRAMEWORKS = ("torch", "pytorch_lightning", "lightning.")  # modules that are not part of a submission

_WIDTH = frozenset(
    """dmodel embeddim embdim emb embed embedsize embedingdim embeddingdim embeddingsize embsize embedding
    hiddensize hiddendim hidden hid hiddim dim nembd nembed din dout d model modeldim modelsize units
    numhiddens numhidden features infeatures outfeatures inputdim outputdim indim outdim querydim keydim
    valuedim qdim kdim vdim keysize querysize valuesize channels inchannels outchannels width nstate
    nfeat nfeatures dimin dimout dmodels ndim dinput doutput size hiddenunits dembed dembd dembedding
    nemb nhidden nhid inputsize outputsize tokendim latentdim nunits c crossdim contextdim featuredim
    featdim dimmodel dims statedim attndim attentiondim dattn dimension ndims innerdim embeds nmodel
    wordsize embeddingdimension embeddim_ hdim dhidden inputdepth outputdepth depth totalkeydepth
    totalvaluedepth keydepth valuedepth modeldepth kvdim memorydim querywidth dmod largeur breite ancho
    dmodell dmodelo dmodele modelldim dimension dimensione largura dimensao tokenembeddim tokenembeddingdim
    encdim decdim qsize ksize vsize embedwidth embeddingwidth ninp nin nout ncmodel""".split()
)
_HEADS = frozenset(
    """h heads nhead nheads numheads numberofheads numattentionheads head numhead nattnheads headnum headsnum
    headcount attentionheads nh noheads numheadsattention nattentionheads attnheads headcounts
    numofheads headnumber amountheads numqueryheads nqheads numqheads koepfe kpfe anzahlkoepfe nkoepfe
    tetes ttes ntetes nbtetes nombretetes cabezas ncabezas numcabezas cabecas cabeas ncabecas numcabecas
    teste nteste""".split()
)
_KEY_HEADS = frozenset(
    """numkvheads nkvheads numkeyvalueheads kvheads nkvhead nkeyvalueheads numkvhead numkeyheads
    numvalueheads nkeyheads keyheads kvh headskv nkv numkv numkvgroups nkvgroups numquerygroups ngroups
    groups kvgroups numgroups""".split()
)
_HEAD_DIM = frozenset(
    """headdim headsize dhead dimhead dk dv dq dkey dvalue dquery sizeperhead headwidth dimperhead
    attentionheadsize kqdim headdims dimheads dimk dimv kdimperhead headhiddensize perheaddim headembd
    qkdim vheaddim""".split()
)
VALUE_DIM = frozenset("dv dvalue dimv vheaddim vdimperhead valuedimperhead".split())  # of one head
_LENGTH = frozenset(
    """blocksize maxlen contextlength maxseqlen seqlen seqlength ctxlen nctx maxlength maxpositionembeddings
    contextsize contextwindow sequencelength length npositions maxsequencelength ctx
    contextlen maxposition block maxcontext numtokens maxseqlength maxseq contextlengths maxtokens
    ncontext seqmax maxsequence maxsequencelen numpatches npatches ntokens maxseqlength ntok
    sentencelength sentencelen seqlens_ tokens timesteps maxtime maxt""".split()
)
_QUERY = frozenset(
    """q query queries xq qx qinput inputq queryinput inputquery qin querystates tgt target querytensor xquery
    queryinputs inqueries inq qseq queryseq qs qdata""".split()
)
_KEY = frozenset(
    """k key keys xk kx kdata kinput inputk keyinput inputkey kin keystates keytensor xkey inkeys ink kseq
    ks""".split()
)
_VALUE = frozenset(
    """v value values val vals xv vx vinput inputv valueinput inputvalue vin valuestates valuetensor xvalue
    invalues inv vseq vs vdata""".split()
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
    xcontext hiddenkv xb inputkv xmem encoderstate crossattentionstates
    mdata""".split()
)


def bare(name: str) -> str:
    """Return the letters of a name in lower case: d_model, dModel and D_MODEL are dmodel."""
    return re.sub(r"[^a-z]", "", name.lower())


_SPELLED_OUT = (  # dimension_of_key is key_dim, how_many_heads is num_heads
    (re.compile(r"(?:dimensions?|dims?|sizes?|widths?)of(?:the|each|one)?(\w+?)s?"), r"\1dim"),
    (re.compile(r"(?:howmany|numbersof|counts?of|amountof)(?:the)?(\w+)"), r"num\1"),
)


def _shortened(word: str) -> str:
    """Return the usual short form of a spelled-out name."""
    for pattern, short in _SPELLED_OUT:
        if (match := pattern.fullmatch(word)) is not None:
            return match.expand(short)
    return word


_INPUT_WIDTH = re.compile(  # of an input that has a name of its own: text_dim, latent_channels
    r"(text|txt|image|img|audio|video|vis|visual|vision|lang|language|latent|latents|query|key|value|context|ctx"
    r"|cond|encoder|decoder|enc|dec|src|source|tgt|target|point|node|graph|memory|mem|cross|self|kv|q|k|v|in|out"
    r"|input|output)(feat|feature|features|hidden|embed|token)?(dims?|channels?|width|features)"
)


def size_word(name: str) -> str | None:
    """Return the meaning of a constructor's parameter or a configuration field, such as "heads"."""
    word = _shortened(bare(name))
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
    if _INPUT_WIDTH.fullmatch(word):
        return "width"
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
    if word in {"srratio", "spatialreductionratio", "reductionratio", "spatialreduction", "srscale"}:
        return "reduction"
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
    if word.startswith(("use", "is", "has", "return", "outputattn", "outputattent", "outputweight", "need")):
        return "flag"
    if "flash" in word or word in {
        "outputhiddenstates",
        "outputscores",
        "vis",
        "visualize",
        "debug",
        "verbose",
    }:
        return "flag"
    if word.startswith(("num", "n")) and "head" in word:
        return "heads"
    return None


_COUNTED = re.compile(r"(num|n|nb)(valid|real)?(frames|tokens|words|keys|steps)")  # of each sample


def input_word(name: str) -> str | None:
    """Return which input of `forward` a parameter is: query, key, value, x, memory, mask or lengths."""
    word = bare(name)
    if "validlen" in word or word.endswith(("lengths", "lens")) or _COUNTED.fullmatch(word):
        return "lengths"
    if word in {"headmask", "layerheadmask"}:
        return None
    if (
        "mask" in word
        or "keep" in word
        or word in {"pad", "padding", "bias", "attnbias", "attentionbias", "m"}
    ):
        return "mask"
    tables = (("query", _QUERY), ("key", _KEY), ("value", _VALUE), ("x", _X), ("memory", _MEMORY))
    for meaning, words in tables:
        if word in words:
            return meaning
    return None


_AROUND = (
    r"(?:weights?|kernel|matrix|p|theta|mat|linear|lin|projections?|project|proj|transform|layers?|dense|fc|to|nets?|w|c|self|"
    r"attn|attention|mha|multihead|heads?|embeddings?|embed|map|params?|bias|b|states?|input|in|vectors?|mlp|conv|all|"
    r"vers|zu|para|proy\w*|projecao|projektion|couche|capa|camada|schicht)*"
)
_CORES = {
    "qkv": r"qkvs?|querykeyvalue|querieskeysvalues|kqv|qvk|vkq|kvq|vqk",
    "kv": r"kvs?|keyvalue",
    "qk": r"qk|querykey",
    "q": r"q|qs|query|queries|querys|que|consultas?|requetes?|anfragen?|abfragen?|zapytani[ae]|zapros\w*",
    "k": r"k|ks|key|keys|claves?|chaves?|cles?|schluessel|klucze?|chiav[ei]|klyuch\w*",
    "v": r"v|vs|val|vals|value|values|valor|valores|valeurs?|werte?|wartosci?|valor[ei]|znacheni\w*",
    "o": r"o|os|out|outs|output|concat|concatenate|unify|unified|combine|combiner|merge|final|wo|mixer|join"
    r"|salida|saida|sortie|ausgang|ausgabe|uscita|wyjscie|vyhod",
}
_ROLES = {role: re.compile(f"{_AROUND}(?:{core}){_AROUND}") for role, core in _CORES.items()}


def role_word(name: str) -> str | None:
    """Return which projection a part of a parameter's path names: q, k, v, o, qkv, kv or qk."""
    word = bare(name)
    if word in {"cattn", "inproj", "inprojweight", "inprojbias", "win", "bin"}:
        return "qkv"
    return next((role for role, pattern in _ROLES.items() if pattern.fullmatch(word)), None)


_SHOWN = (
    r"(?:may|can|allow\w*|keep|kept|attends?|attended|visible|valid|real|seen?|shown?|shows|unmasked|"
    r"not masked|looks? at|participates?|tokens?|take part|unpadded|non-?pad\w*)"
)
_HIDDEN = (
    r"(?:mask(?:ed|s)?(?: out)?|"
    r"hid\w*|ignor\w*|block\w*|not (?:be )?(?:attend\w*|allowed|visible|seen)|pad\w*|"
    r"forbid\w*|exclud\w*|disallow\w*|invalid|cannot|must not|may not|future)"
)
_BETWEEN = (
    r"[\s\"'`]*(?:=+|:|means?|is|are|for|->|marks?|where|indicates?|denotes?|at|in)?[\s\"'`]*"
    r"(?:(?:the|a|an|positions?|keys?|that|which|to|query|queries|be|it|is|are|should|we|you|elements?|entries|where|"
    r"real|token'?s?)[\s\"'`]+)*"
)


@dataclass(frozen=True)
class MaskDescription:
    """The meaning of a mask, from documentation and code."""

    true_attends: bool | None = None
    added: bool = False  # its numbers are added to the scores
    shape: str = ""  # "[B, T, S]", "[B, 1, T, S]", "[B, S]", "[T, S]"
    in_words: bool = False  # from a docstring or comment, not only from code
    replaces: bool = False  # the code makes a causal mask only where this one is None
    counted: bool = False  # the code subtracts it from 1: its numbers are 0 and 1


def source_texts(obj: object, source: str | None) -> list[str]:
    """Return the source of a function, or of a class and its bases, then the file's docstring."""
    if inspect.isroutine(obj):
        owners: list[Any] = [obj]
    else:
        cls = obj if isinstance(obj, type) else type(obj)
        owners = [
            owner
            for owner in cls.__mro__
            if not owner.__module__.startswith(FRAMEWORKS) and owner is not object
        ]
        if not owners:
            return []
    texts = []
    text, tree = (readable(source), tree_of(source)) if source else (None, None)
    definitions = {node.name: node for node in nodes(tree, DEFINITIONS)} if tree is not None else {}
    for owner in owners:
        definition = definitions.get(getattr(owner, "__name__", ""))  # the last of its name
        if definition is not None and text is not None:
            texts.append(segment(text, definition))
            continue
        try:
            texts.append(source_of_definition(owner))
        except (OSError, TypeError):
            continue
    texts.append((ast.get_docstring(tree) or "") if tree is not None else "")
    return texts


def _words(text: str, argument: str = "") -> str:
    """Return the lines of docstrings and comments about masks, in lower case.

    argument: only those that begin with this name, as an entry of a list of arguments does.
    """
    about = rf"^[\s\-*`:]*{re.escape(argument.lower())}\b" if argument else r"mask|padding|hide"
    quoted = re.findall(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''", text, flags=re.S)
    lines = [line for pair in quoted for part in pair for line in part.splitlines()]
    lines += re.findall(r"#(.*)", text)
    if '"""' not in text and "def " not in text:
        lines = text.splitlines()
    about_masks = []
    for i, line in enumerate(lines):
        if re.search(about, line.lower()):
            about_masks.append(line)
            if i + 1 < len(lines) and not re.match(r"\s*\w+\s*(?:\([^)]*\))?:", lines[i + 1]):
                about_masks.append(lines[i + 1])
    return " ".join(about_masks).lower()


def _polarity_in_words(low: str) -> bool | None:
    """Return True if the words say that True may be attended to, False if it is hidden, None if neither."""
    polarities = set()
    for values, flips in ((r"true|1|1s|ones?|non-?zeros?", False), (r"false|0|0s|zeros?", True)):
        if re.search(rf"(?<![\w.\-])(?:{values})(?![\w.]){_BETWEEN}{_HIDDEN}", low):
            polarities.add(flips)
        elif re.search(rf"(?<![\w.\-])(?:{values})(?![\w.]){_BETWEEN}{_SHOWN}\b", low) or re.search(
            rf"(?<![\w.\-])(?:{values})\s+(?:or\s+\w+\s+)?(?:means?|where)\b[^.;]*?\b{_SHOWN}\b", low
        ):
            polarities.add(not flips)
    return polarities.pop() if len(polarities) == 1 else None


def _polarity_in_code(text: str, argument: str) -> bool | None:
    """Return True if the code hides where the mask is False, False where it is True, None if neither."""
    low = re.sub(r"#.*", "", text.lower())
    polarities = set()
    name = rf"(?:self\.)?(?:{re.escape(argument.lower())}|\w*mask\w*)"
    after = r"(?:\[[^\]]*\]|\.\w+\([^()]*\))*"
    attends = (
        rf"masked_fill_?\(\s*{name}{after}\s*==\s*(?:0|false)",
        rf"masked_fill_?\(\s*(?:~|torch\.logical_not\(|not)\s*{name}",
        rf"masked_fill_?\(\s*{name}{after}\.logical_not\(",
        rf"where\(\s*{name}{after}\s*==\s*(?:0|false)",
        rf"where\(\s*~\s*{name}",
        rf"where\(\s*{name}{after}\s*,\s*\w*(?:score|attn|att|energy|logit|sim|dot)",
        rf"\(\s*1(?:\.0?)?\s*-\s*{name}",
        rf"attn_mask\s*=\s*{name}\s*[,)]",
    )
    hides = (
        rf"masked_fill_?\(\s*{name}(?:\[[^\]]*\]|\.(?!logical_not)\w+\([^()]*\))*\s*,",
        rf"masked_fill_?\(\s*{name}{after}\s*==\s*(?:1|true)",
        rf"{name}\s*\*\s*\(?-\s*(?:1e|float|torch|np|math)",
    )
    if any(re.search(pattern, low) for pattern in attends):
        polarities.add(True)
    if any(re.search(pattern, low) for pattern in hides):
        polarities.add(False)
    return polarities.pop() if len(polarities) == 1 else None


_ADDED = r"added to|additive|adds? to the scores|-inf\b|negative infinity|negative number"
_LOW = r"negative values?|very negative|-\s*1e\d|-\s*10\d{2,}|finfo|bias o[nf]"  # if the code also adds it
_B, _T, _S = (
    r"(?:b|n|bs|batch\w*)",
    r"(?:t|l|q|seq\w*|\w*len\w*|time\w*|n_?q)",
    r"(?:s|t|l|k|seq\w*|\w*len\w*|time\w*|n_?k)",
)
_SHAPES = (
    ("[B, 1, T, S]", rf"[\[(]\s*{_B}\s*,\s*(?:1|h|heads?|num_heads)\s*,\s*{_T}\s*,\s*{_S}\s*[\])]"),
    ("[B, 1, 1, S]", rf"[\[(]\s*{_B}\s*,\s*1\s*,\s*1\s*,\s*{_S}\s*[\])]"),
    ("[B, T, S]", rf"[\[(]\s*{_B}\s*,\s*{_T}\s*,\s*{_S}\s*[\])]"),
    ("[B, S]", rf"[\[(]\s*{_B}\s*,\s*{_S}\s*[\])]"),
    ("[T, S]", rf"[\[(]\s*{_T}\s*,\s*{_S}\s*[\])]"),
)


def _shape_in_words(low: str) -> str:
    """Return the first shape that is written for a mask, or ""."""
    matches = [
        (m.end(), shape) for shape, axes in _SHAPES for m in re.finditer(rf"mask[^.\n]{{0,60}}?{axes}", low)
    ]
    return min(matches)[1] if matches else ""


def describe_mask(texts: list[str], argument: str) -> MaskDescription:
    """Return the meaning of a mask argument, by documentation first and by the code otherwise."""
    shape, added = "", False
    own = [_words(text, argument) for text in texts]  # several masks may mean different things
    for low in (*own, *map(_words, texts)):
        if not low:
            continue
        added = added or bool(re.search(_ADDED, low) or (re.search(_LOW, low) and _adds(texts, argument)))
        shape = shape or _shape_in_words(low)
        polarity = None if added else _polarity_in_words(low)
        if polarity is not None or added:
            return MaskDescription(polarity, added, shape, in_words=polarity is not None)
    for text in texts:
        polarity = _polarity_in_code(text, argument)
        if polarity is not None:
            counted = re.search(rf"\(\s*1(?:\.0?)?\s*-\s*{re.escape(argument)}\b", text) is not None
            return MaskDescription(polarity, False, shape, counted=counted)
    return MaskDescription(None, False, shape)


def replaces_causal(texts: list[str], argument: str) -> bool:
    """Return True if the code makes its causal mask only if this argument is None."""
    code = "\n".join(re.sub(r"#.*", "", text) for text in texts)
    name = re.escape(argument)
    made = rf"\bif {name} is None\s*:\s*{name}\s*=[^\n]*(\btril|\btriu|causal)"
    return re.search(rf"\bis_causal\s*=[^,\n]*\b{name} is None\b|{made}", code) is not None


def _adds(texts: list[str], argument: str) -> bool:
    """Return True if the code adds this argument to something unchanged."""
    code = "\n".join(re.sub(r"#.*", "", text) for text in texts)
    return re.search(rf"\+=?\s*\(?{re.escape(argument)}\b(?!\s*[*=<>])", code) is not None


def builds_causal_mask(texts: list[str], name: str) -> bool:
    """Return True if the code builds a triangle for itself, or has "causal" in its name."""
    code = "\n".join(texts[:-1])
    code = re.sub(r"(\"\"\"|''').*?\1", "", code, flags=re.S)
    code = re.sub(r"#.*", "", code)
    triangle = re.search(
        r"\btril\w*\b|\btriu\w*\b|is_causal\s*=\s*True|generate_square_subsequent_mask", code
    )
    return bool(triangle) or "causal" in name.lower()
