#!/bin/sh
# Installs the real apptainer from Debian's unstable into a separate folder, with the C library that it needs, on a system
# whose packages lack it (Debian 12 and 13). Run it as root.
# usage: install.sh [FOLDER]
set -eu
to=${1:-/opt/apptainer} work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/etc" "$work/lists/partial" "$work/cache/archives/partial" "$to"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" \
    >"$work/etc/sources.list"
apt-get install -y -q patchelf squashfs-tools squashfuse uidmap
cd "$work"
own="-q -o Dir::Etc=$work/etc -o Dir::State::Lists=$work/lists -o Dir::Cache=$work/cache -o APT::Sandbox::User=root"
# shellcheck disable=SC2086
apt-get $own update && apt-get $own download apptainer libc6 libseccomp2 libsqlite3-0
for deb in ./*.deb; do dpkg-deb -x "$deb" "$to"; done
# apptainer looks for its settings and its session folder beside itself, in two places.
mkdir -p "$to/usr/lib/var/lib/apptainer/mnt/session"
cp -r "$to/etc" "$to/usr/etc"
cp -r "$to/etc" "$to/usr/lib/etc"
libs=$to/usr/lib/x86_64-linux-gnu
for program in "$to/usr/bin/apptainer" "$libs/apptainer/bin/starter"; do
    patchelf --set-interpreter "$libs/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libs" "$program"
done
"$to/usr/bin/apptainer" --version
