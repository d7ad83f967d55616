# Takes Slurm off a node and makes a site's source of the node's own packages,
# files of /opt/site: Debian's, packed again, so that nothing is fetched.
set -eu
pack() { # NAME DIRECTORY
    d=$(mktemp -d)
    mkdir "$d/DEBIAN"
    dpkg-query --listfiles "$1" | while read -r f; do
        if [ -d "$f" ] && { [ ! -L "$f" ] || [ "${f%/*}" = "" ]; }; then # /lib is a link
            mkdir -p "$d$f"
            chmod --reference="$f" "$d$f"
            chown --reference="$f" "$d$f"
        elif [ -e "$f" ] || [ -L "$f" ]; then
            cp -a "$f" "$d$f"
        fi
    done
    dpkg-query --status "$1" | sed -e '/^Status:/d' -e '/^Conffiles:/,/^[^ ]/{/^Conffiles:/d;/^ /d}' >"$d/DEBIAN/control"
    # shellcheck disable=SC2016
    dpkg-query --show --showformat='${Conffiles}\n' "$1" | awk '$1 ~ /^\// {print $1}' >"$d/DEBIAN/conffiles"
    for s in preinst postinst prerm postrm; do
        [ ! -e "/var/lib/dpkg/info/$1.$s" ] || cp -p "/var/lib/dpkg/info/$1.$s" "$d/DEBIAN/$s"
    done
    chmod 755 "$d"
    dpkg-deb -Znone --build "$d" "$2/$1.deb" >/dev/null
    rm -r "$d"
}
mkdir -p /opt/site /opt/local
pack munge /opt/site
pack slurm-client /opt/site
pack slurmd /opt/local
systemctl disable --now slurmd munge 2>/dev/null || true
DEBIAN_FRONTEND=noninteractive dpkg --purge slurmctld slurmd slurm-client munge >/dev/null 2>&1
rm -rf /etc/munge /var/lib/munge /var/log/munge /etc/slurm
cd /opt/site
for f in *.deb; do
    dpkg-deb --field "$f"
    printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$f" "$(stat -c %s "$f")" "$(sha256sum "$f" | cut -d' ' -f1)"
done >Packages
echo 'deb [trusted=yes] file:/opt/site ./' >/etc/apt/sources.list.d/site.list
apt-get update -qq -oDir::Etc::sourcelist=/etc/apt/sources.list.d/site.list -oDir::Etc::sourceparts=-
