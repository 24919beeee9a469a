"""The choice of a MIG layout, of a file or of those made from the GPUs."""

from typing import Final

import msgspec

from metagpu.compat import formats
from metagpu.compat.contract import CompatNote, ConversionContext
from metagpu.compat.formats import ConfigFormat, RecognizedFiles
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.profiles import ClusterChoice

_LABEL: Final = "nvidia.com/mig.config"
_LEFT_TO_MIG_MANAGER: Final = CompatNote(
    "label",
    0,
    _LABEL,
    "is left to NVIDIA's MIG manager, which nvidia.com/gpu.deploy.mig-manager=true runs on this "
    "node; with false, metagpu makes the layout",
)


class LayoutChoice(msgspec.Struct, frozen=True):
    """The choice of one of several MIG layouts.

    Attributes:
        name: the chosen layout, `None` for none.
        known: the layouts that there are.
        refusal: why a label's layout is not the chosen one; empty where it is.
        unmade: the option's layout, where the GPUs from which it is made are not known.
        notes: who follows the label, if metagpu does not.
    """

    name: str | None = None
    known: tuple[str, ...] = ()
    refusal: str = ""
    unmade: str | None = None
    notes: tuple[CompatNote, ...] = ()

    def check(self) -> None:
        """Check that the layout can be made.

        Raises:
            ConfigError: only a node's GPUs say what it is.
        """
        if self.unmade is not None:
            problem = (
                f"no file has layouts such as {self.unmade!r}, and they are made from a node's "
                "GPUs then: use metagpu explain, on a node or with --simulate NODE"
            )
            raise ConfigError(problem, ConfigReason.NO_CHOICE, file="--mig-config")


def check_no_layouts(files: RecognizedFiles) -> None:
    """Check that the label that chooses a layout is not needed.

    Without it the GPUs would be offered whole, to pods that keep the layout away.

    Raises:
        ConfigError: a file has layouts.
    """
    for document, form in zip(files.documents, files.formats, strict=True):
        if form is ConfigFormat.MIG_PARTED:
            problem = f"the API server has not said yet which layout the label {_LABEL} chooses"
            raise document.error("mig-configs", problem, ConfigReason.NO_CHOICE)


def choose_layout(
    files: RecognizedFiles, context: ConversionContext, cluster: ClusterChoice, last: str | None
) -> tuple[RecognizedFiles, LayoutChoice]:
    """Return files with all layouts that there are, and the chosen layout.

    An option comes before a label. Where a label's name is unknown, the layout that it chose `last`
    stays.

    Raises:
        ConfigError: the layouts of a file break mig-parted's rules.
    """
    option, label = context.mig_config, cluster.mig_config
    if ConfigFormat.MIG_PARTED not in files.formats:
        if not files.lacks_layouts or (option or label) is None:
            return files, LayoutChoice()
        if option is None and cluster.mig_manager:
            return files, LayoutChoice(notes=(_LEFT_TO_MIG_MANAGER,))
        if context.models is None:
            return files, LayoutChoice(unmade=option)
        files = files.with_layouts(context.models)

    known = formats.layout_names(files)
    if option or label is None or label in known:
        return files, LayoutChoice(option or label, known)
    refusal = f"there is no layout {label!r} (label {_LABEL}); there are: {', '.join(known)}"
    return files, LayoutChoice(last if last in known else None, known, refusal)
