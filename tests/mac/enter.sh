# Make a mount namespace resemble a Mac, and run a program in it: sh enter.sh FOLDER SITE_PACKAGES PROGRAM …
# FOLDER belongs to the test. All mounts and all processes end with the namespace.
set -e
folder=$1 site=$2; shift 2
mkdir -p "$folder/proc" "$folder/dev" "$folder/none" "$folder/layer"
mount --bind /proc "$folder/proc"
mount --bind "$folder/none" /proc
mount -t tmpfs dev "$folder/dev"
for name in null zero full random urandom tty; do
  : > "$folder/dev/$name"
  mount --bind "/dev/$name" "$folder/dev/$name"
done
mkdir "$folder/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$folder/dev/pts"
ln -s pts/ptmx "$folder/dev/ptmx"
mount --rbind "$folder/dev" /dev
[ ! -e /etc/machine-id ] || mount --bind /dev/null /etc/machine-id
mount -t tmpfs layer "$folder/layer"
mkdir "$folder/layer/upper" "$folder/layer/work"
cp "$folder/like_a_mac.py" "$folder/like_a_mac.pth" "$folder/layer/upper"
mount -t overlay site -o "lowerdir=$site,upperdir=$folder/layer/upper,workdir=$folder/layer/work" "$site"
hostname Someones-MacBook-Pro.local
ip link set lo up
exec "$@"
