"""Named frame sizes and frame counts of Open-Sora 1.2, for configs, prompts and buckets.

A resolution ("240p", "512") is a number of pixels, with a size for each of its aspect ratios. Their
keys are height / width to two decimals ("0.56"). Names of aspect ratios are height:width as well:
"9:16" is a wide frame.
"""

from __future__ import annotations

_TABLES = {
    "144p": """
        0.38:117x312 0.43:125x291 0.48:133x277 0.50:135x270 0.53:139x262 0.54:141x260 0.56:144x256
        0.62:151x241 0.67:156x234 0.75:166x221 1.00:192x192 1.33:221x165 1.50:235x156 1.78:256x144
        1.89:263x139 2.00:271x135 2.08:277x132
    """,
    "256": """
        0.25:128x512 0.26:128x496 0.27:128x480 0.28:128x464 0.32:144x448 0.33:144x432 0.35:144x416
        0.4:160x400 0.42:160x384 0.48:176x368 0.5:176x352 0.52:176x336 0.57:192x336 0.6:192x320
        0.68:208x304 0.72:208x288 0.78:224x288 0.82:224x272 0.88:240x272 0.94:240x256 1.0:256x256
        1.07:256x240 1.13:272x240 1.21:272x224 1.29:288x224 1.38:288x208 1.46:304x208 1.67:320x192
        1.75:336x192 2.0:352x176 2.09:368x176 2.4:384x160 2.5:400x160 2.89:416x144 3.0:432x144
        3.11:448x144 3.62:464x128 3.75:480x128 3.88:496x128 4.0:512x128
    """,
    "240p": """
        0.38:196x522 0.43:210x490 0.48:222x462 0.50:226x452 0.53:232x438 0.54:236x436 0.56:240x426
        0.62:252x404 0.67:262x393 0.75:276x368 1.00:320x320 1.33:370x278 1.50:392x262 1.78:426x240
        1.89:440x232 2.00:452x226 2.08:462x222
    """,
    "360p": """
        0.38:294x784 0.43:314x732 0.48:332x692 0.50:340x680 0.53:350x662 0.54:352x652 0.56:360x640
        0.62:380x608 0.67:392x588 0.75:416x554 1.00:480x480 1.33:554x416 1.50:588x392 1.78:640x360
        1.89:660x350 2.00:678x340 2.08:692x332
    """,
    "480p": """
        0.38:392x1046 0.43:420x980 0.48:444x925 0.50:452x904 0.53:466x880 0.54:470x870 0.56:480x854
        0.62:506x810 0.67:522x784 0.75:554x738 1.00:640x640 1.33:740x555 1.50:784x522 1.78:854x480
        1.89:880x466 2.00:906x454 2.08:924x444
    """,
    "720p": """
        0.38:588x1568 0.43:628x1466 0.48:666x1388 0.50:678x1356 0.53:698x1318 0.54:706x1306
        0.56:720x1280 0.62:758x1212 0.67:784x1176 0.75:832x1110 1.00:960x960 1.33:1108x832
        1.50:1176x784 1.78:1280x720 1.89:1320x698 2.00:1358x680 2.08:1386x666
    """,
    "1080p": """
        0.38:882x2352 0.43:942x2198 0.48:998x2080 0.50:1018x2036 0.53:1048x1980 0.54:1058x1958
        0.56:1080x1920 0.62:1138x1820 0.67:1176x1764 0.75:1248x1664 1.00:1440x1440 1.33:1662x1246
        1.50:1764x1176 1.78:1920x1080 1.89:1980x1048 2.00:2036x1018 2.08:2078x998
    """,
    "2k": """
        0.38:1176x3136 0.43:1256x2930 0.48:1330x2770 0.50:1358x2716 0.53:1398x2640 0.54:1412x2612
        0.56:1440x2560 0.62:1518x2428 0.67:1568x2352 0.75:1662x2216 1.00:1920x1920 1.33:2218x1664
        1.50:2352x1568 1.78:2560x1440 1.89:2638x1396 2.00:2716x1358 2.08:2772x1330
    """,
    "2880": """
        0.25:1408x5760 0.26:1408x5568 0.27:1408x5376 0.28:1408x5184 0.32:1600x4992 0.33:1600x4800
        0.34:1600x4672 0.4:1792x4480 0.42:1792x4288 0.47:1920x4096 0.49:1920x3904 0.51:1920x3776
        0.55:2112x3840 0.59:2112x3584 0.68:2304x3392 0.72:2304x3200 0.78:2496x3200 0.83:2496x3008
        0.89:2688x3008 0.93:2688x2880 1.0:2880x2880 1.07:2880x2688 1.12:3008x2688 1.21:3008x2496
        1.28:3200x2496 1.39:3200x2304 1.47:3392x2304 1.7:3584x2112 1.82:3840x2112 2.03:3904x1920
        2.13:4096x1920 2.39:4288x1792 2.5:4480x1792 2.92:4672x1600 3.0:4800x1600 3.12:4992x1600
        3.68:5184x1408 3.82:5376x1408 3.95:5568x1408 4.0:5760x1408
    """,
    "4k": """
        0.38:1764x4704 0.43:1886x4400 0.48:1996x4158 0.50:2036x4072 0.53:2096x3960 0.54:2118x3918
        0.62:2276x3642 0.56:2160x3840 0.67:2352x3528 0.75:2494x3326 1.00:2880x2880 1.33:3326x2494
        1.50:3528x2352 1.78:3840x2160 1.89:3958x2096 2.00:4072x2036 2.08:4156x1994
    """,
}
# Multiples of the sizes of "256".
_SCALED = {"512": 2, "1024": 4, "2048": 8}

_ASPECT_NAMES = """
    3:8=0.38 9:21=0.43 12:25=0.48 1:2=0.50 9:17=0.53 27:50=0.54 9:16=0.56 5:8=0.62 2:3=0.67 3:4=0.75
    1:1=1.00 4:3=1.33 3:2=1.50 16:9=1.78 17:9=1.89 2:1=2.00 50:27=2.08
"""
ASPECT_RATIOS = dict(entry.split("=") for entry in _ASPECT_NAMES.split())
"""Names (height:width) -> keys of a resolution's sizes."""

_LENGTHS = (1, 2, 4, 8, 16)
FRAMES = {f"{n}x": 51 * n for n in _LENGTHS} | {f"{2 * n}s": 51 * n for n in _LENGTHS}
"""Names of lengths -> frames; "2s" is two seconds at 25.5 frames per second, and so is "1x"."""


def _parsed(table: str) -> dict[str, tuple[int, int]]:
    """``"0.38:117x312 .."`` -> ``{"0.38": (117, 312), ..}``."""
    entries = (entry.replace(":", "x").split("x") for entry in table.split())
    return {key: (int(height), int(width)) for key, height, width in entries}


def _all_sizes() -> dict[str, dict[str, tuple[int, int]]]:
    sizes = {name: _parsed(table) for name, table in _TABLES.items()}
    for name, factor in _SCALED.items():
        sizes[name] = {}
        for key, (height, width) in sizes["256"].items():
            sizes[name][key] = height * factor, width * factor
    return sizes


SIZES: dict[str, dict[str, tuple[int, int]]] = _all_sizes()
"""Resolution -> aspect ratio (key) -> (height, width) in pixels, in the order of preference."""


def num_pixels(resolution: str) -> int:
    """Pixels per frame of a resolution."""
    sizes = sizes_of(resolution)
    # Not all tables have 9:16.
    height, width = sizes["0.56"] if "0.56" in sizes else sizes["1.0"]
    return height * width


def sizes_of(resolution: str) -> dict[str, tuple[int, int]]:
    """Aspect ratio (key) -> (height, width) of a resolution.

    Raises:
        ValueError: for a name that is not known.
    """
    if resolution not in SIZES:
        raise ValueError(
            f"got resolution {resolution!r}; expected one of {list(SIZES)}; choose one of these"
        )
    return SIZES[resolution]


def named_size(resolution: str, aspect_ratio: str) -> tuple[int, int]:
    """(height, width) of a resolution at an aspect ratio.

    Args:
        aspect_ratio: a name ("9:16"), or a key of the resolution ("0.56"). The keys of "256" and
            its multiples have other formats, and no names: "1.0", not "1:1".

    Raises:
        ValueError: for unknown names, and aspect ratios that the resolution does not have.
    """
    sizes = sizes_of(resolution)
    key = ASPECT_RATIOS.get(aspect_ratio, aspect_ratio)
    if key not in sizes:
        names = [name for name, aspect in ASPECT_RATIOS.items() if aspect in sizes]
        raise ValueError(
            f"got aspect_ratio {aspect_ratio!r} with resolution {resolution!r}; expected one of "
            f"{[*names, *sizes]}; choose one of these, or give the size in pixels instead"
        )
    return sizes[key]


def closest_aspect(resolution: str, height: float, width: float) -> str:
    """The key of the resolution's aspect ratio nearest to ``height / width``."""
    return min(sizes_of(resolution), key=lambda key: abs(height / width - float(key)))


def named_frames(name: str | int) -> int:
    """The number of frames of a name ("2s", "4x") or a number.

    Raises:
        ValueError: for anything else.
    """
    if name in FRAMES:
        return FRAMES[str(name)]
    if not str(name).isdecimal() or int(name) < 1:
        raise ValueError(
            f"got num_frames {name!r}; expected a positive number or one of {list(FRAMES)}; write "
            "one"
        )
    return int(name)
