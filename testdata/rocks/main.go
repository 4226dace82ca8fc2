// Command rocks owns a RocksDB database whose content is a history: numbers from 1 on.
//
//	rocks own DIR    writes numbers; "write N", "wait", "checkpoint DIR" and "quit" on stdin
//	rocks read DIR   prints how many numbers there are, and fails if they are no prefix
package main

/*
#cgo LDFLAGS: -lrocksdb
#include <stdlib.h>
#include <rocksdb/c.h>
*/
import "C"

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"
)

func main() {
	if len(os.Args) != 3 {
		fail(errors.New("usage: rocks own|read DIR"))
	}
	db, err := open(os.Args[2])
	if err != nil {
		fail(err)
	}
	last, err := db.history()
	if err == nil && os.Args[1] == "read" {
		fmt.Println(last)
	} else if err == nil {
		err = db.own(last)
	}
	C.rocksdb_close(db.c)
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

type database struct {
	c     *C.rocksdb_t
	write *C.rocksdb_writeoptions_t
	read  *C.rocksdb_readoptions_t
}

// check takes the error that a call of the library left.
func check(e *C.char) error {
	if e == nil {
		return nil
	}
	defer C.rocksdb_free(unsafe.Pointer(e))
	return errors.New(C.GoString(e))
}

// open has small memtables, so that tables are many, and recycles its logs.
func open(dir string) (*database, error) {
	o := C.rocksdb_options_create()
	defer C.rocksdb_options_destroy(o)
	C.rocksdb_options_set_create_if_missing(o, 1)
	C.rocksdb_options_set_paranoid_checks(o, 1)
	C.rocksdb_options_set_write_buffer_size(o, 1<<20)
	C.rocksdb_options_set_recycle_log_file_num(o, 4)
	name := C.CString(dir)
	defer C.free(unsafe.Pointer(name))
	var e *C.char
	db := &database{c: C.rocksdb_open(o, name, &e)}
	db.write, db.read = C.rocksdb_writeoptions_create(), C.rocksdb_readoptions_create()
	return db, check(e)
}

func bytesOf(b []byte) *C.char { return (*C.char)(unsafe.Pointer(&b[0])) }

func value(n uint64) []byte {
	v := make([]byte, 1000)
	x := n
	for i := 0; i < len(v); i += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(v[i:], x)
	}
	return v
}

func (db *database) put(n uint64) error {
	k, v := binary.BigEndian.AppendUint64(nil, n), value(n)
	var e *C.char
	C.rocksdb_put(db.c, db.write, bytesOf(k), C.size_t(len(k)), bytesOf(v), C.size_t(len(v)), &e)
	return check(e)
}

func (db *database) history() (last uint64, err error) {
	it := C.rocksdb_create_iterator(db.c, db.read)
	defer C.rocksdb_iter_destroy(it)
	for C.rocksdb_iter_seek_to_first(it); C.rocksdb_iter_valid(it) != 0; C.rocksdb_iter_next(it) {
		var kn, vn C.size_t
		k := C.rocksdb_iter_key(it, &kn)
		v := C.rocksdb_iter_value(it, &vn)
		n := binary.BigEndian.Uint64(C.GoBytes(unsafe.Pointer(k), C.int(kn)))
		if n != last+1 || string(C.GoBytes(unsafe.Pointer(v), C.int(vn))) != string(value(n)) {
			return last, fmt.Errorf("number %d follows %d, or has another value", n, last)
		}
		last = n
	}
	var e *C.char
	C.rocksdb_iter_get_error(it, &e)
	return last, check(e)
}

// own writes between commands, in bursts, and answers each command when it is done.
func (db *database) own(last uint64) error {
	commands := make(chan string)
	go func() {
		defer close(commands)
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			commands <- in.Text()
		}
	}()
	limit := last
	for {
		var line string
		open := true
		if last < limit {
			select {
			case line, open = <-commands:
			default:
				if err := db.put(last + 1); err != nil {
					return err
				}
				last++
				continue
			}
		} else {
			line, open = <-commands
		}
		verb, arg, _ := strings.Cut(line, " ")
		if !open || verb == "quit" {
			return nil
		}
		for ; verb == "wait" && last < limit; last++ {
			if err := db.put(last + 1); err != nil {
				return err
			}
		}
		if err := db.do(verb, arg, &limit, last); err != nil {
			return err
		}
		fmt.Println(verb, last)
	}
}

// do does one command: more writes to come, or a checkpoint.
func (db *database) do(verb, arg string, limit *uint64, last uint64) error {
	switch verb {
	case "wait":
		return nil
	case "write":
		n, err := strconv.ParseUint(arg, 10, 64)
		*limit = last + n
		return err
	}
	name := C.CString(arg)
	defer C.free(unsafe.Pointer(name))
	var e *C.char
	cp := C.rocksdb_checkpoint_object_create(db.c, &e)
	if err := check(e); err != nil {
		return err
	}
	defer C.rocksdb_checkpoint_object_destroy(cp)
	C.rocksdb_checkpoint_create(cp, name, 0, &e) // flushed first: see docs/rocksdb.md
	return check(e)
}
