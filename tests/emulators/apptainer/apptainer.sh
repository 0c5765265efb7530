#!/bin/sh
# Stands in for apptainer: accepts only the options that gpurun uses, and runs the command with only the image's bin/
# in PATH. It writes every call into the file $APPTAINER_CALLS.
echo "$*" >>"$APPTAINER_CALLS"
[ "$1" != --silent ] || shift
case $1 in
    pull)
        case $3 in docker://*) ;; *) exit 255 ;; esac
        [ -d "$APPTAINER_REGISTRY" ] || {
            echo "FATAL:   While making image from oci registry: no such host" >&2
            exit 255
        }
        cp -r -- "$APPTAINER_REGISTRY" "$2"
        exit
        ;;
    exec) shift ;;
    *) exit 2 ;;
esac
while :; do
    case $1 in
        --nv) shift ;;
        --bind) shift 2 ;;
        --pwd) cd -- "$2" && shift 2 || exit ;;
        -*) exit 2 ;;
        *) break ;;
    esac
done
image=$1
shift
[ -d "$image" ] || {
    echo "FATAL:   could not open image $image: failed to retrieve path for $image" >&2
    exit 255
}
APPTAINER_CONTAINER=$image PATH=$image/bin exec "$@"
