# shellcheck shell=bash
# What job.sh and install.sh share: errors, modules, profiles of sites.

hpc=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "hpc/$(basename "$0"): $*" >&2
    exit 2
}

# sites: the names of the profiles.
sites() {
    (cd "$hpc/site" && echo *.sh) | sed 's/\.sh//g'
}

# load_modules NAME ...: for profiles, ahead of what reads the modules' variables.
load_modules() {
    local file
    set +u # of the functions and files of module systems
    for file in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh; do
        # A script that is no login shell's may be without the function.
        # shellcheck disable=SC1090
        command -v module >/dev/null || [ ! -r "$file" ] || . "$file"
    done
    if command -v module >/dev/null; then
        module load "$@" || fail "the modules that hpc/site/$site.sh loads must be there ($*): see \`module avail\`"
    else
        echo "hpc/$(basename "$0"): there is no command module here, so that these are not loaded: $*" >&2
    fi
    set -u
}

# read_profile NAME: set and export what a site needs.
read_profile() {
    site=$1
    [ -r "$hpc/site/$site.sh" ] ||
        fail "the site must be one of $(sites) (got '$site'): hpc/README.md says how to add one"
    # shellcheck disable=SC2034  # for who called
    launcher='' launcher_flags='' extras='' build_mpi4py=0
    # shellcheck source=hpc/site/plain.sh
    . "$hpc/site/$site.sh"
}
