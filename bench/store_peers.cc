// Stores that others keep KV in: RocksDB with blob files, and LMDB.
#include <cstring>

#include "chunk_place.h"

#if QUIRE_BENCH_LMDB
#include <lmdb.h>
#endif
#if QUIRE_BENCH_ROCKSDB
#include <rocksdb/db.h>
#include <rocksdb/options.h>
#endif

namespace quire::bench {
namespace {

[[maybe_unused]] void Check(bool ok, const std::string& what) {
  if (!ok) Require(Status(StatusCode::kIoError, what));
}

#if QUIRE_BENCH_ROCKSDB
// Reads past the page cache, as all sides that are asked for a disk do; writes with the log, which
// is what survives the process.
class RocksPlace final : public ChunkPlace {
 public:
  explicit RocksPlace(const PlaceRequest& request) {
    rocksdb::Options options;
    options.create_if_missing = true;
    options.enable_blob_files = true;
    options.min_blob_size = 65536;
    options.blob_file_size = uint64_t{1} << 30;
    options.compression = rocksdb::kNoCompression;
    options.blob_compression_type = rocksdb::kNoCompression;
    options.write_buffer_size = size_t{256} << 20;
    options.max_background_jobs = 2;
    options.use_direct_reads = true;
    rocksdb::DB* database = nullptr;
    Require(rocksdb::DB::Open(options, request.directory + "/rocksdb", &database));
    database_.reset(database);
    write_.sync = request.sync;
  }
  void Put(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      const auto bytes = set.bytes(i);
      const rocksdb::Slice value(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      Require(database_->Put(write_, set.name(i), value));
    }
  }
  // What still lies in its buffer would be read from memory.
  void BeforeGet(const ChunkSet&) override { Require(database_->Flush({})); }
  void Get(const ChunkSet& set, std::span<std::byte> into) override {
    rocksdb::PinnableSlice value;
    for (int64_t i = 0; i < set.size(); ++i) {
      value.Reset();
      Require(database_->Get({}, database_->DefaultColumnFamily(), set.name(i), &value));
      std::memcpy(into.data() + static_cast<size_t>(i) * value.size(), value.data(), value.size());
    }
  }
  void Remove(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) Require(database_->Delete({}, set.name(i)));
  }

 private:
  static void Require(const rocksdb::Status& status) { Check(status.ok(), status.ToString()); }

  std::unique_ptr<rocksdb::DB> database_;
  rocksdb::WriteOptions write_;
};
#endif

#if QUIRE_BENCH_LMDB
// Its map is the page cache: reads are from memory.
class LmdbPlace final : public ChunkPlace {
 public:
  explicit LmdbPlace(const PlaceRequest& request) {
    mdb_env_create(&environment_);
    mdb_env_set_mapsize(environment_, size_t{16} << 30);
    const unsigned flags = MDB_WRITEMAP | MDB_NORDAHEAD | MDB_NOSUBDIR;
    Require(mdb_env_open(environment_, (request.directory + "/lmdb").c_str(),
                         flags | (request.sync ? 0U : MDB_NOSYNC), 0600));
    Require(mdb_txn_begin(environment_, nullptr, 0, &transaction_));
    Require(mdb_dbi_open(transaction_, nullptr, MDB_CREATE, &database_));
    Require(mdb_txn_commit(transaction_));
  }
  ~LmdbPlace() override { mdb_env_close(environment_); }
  void Put(const ChunkSet& set) override {
    for (int64_t i = 0; i < set.size(); ++i) {
      std::string name = set.name(i);
      MDB_val key{name.size(), name.data()};
      MDB_val value{set.bytes(i).size(), nullptr};
      Require(mdb_txn_begin(environment_, nullptr, 0, &transaction_));
      Require(mdb_put(transaction_, database_, &key, &value, MDB_RESERVE));
      std::memcpy(value.mv_data, set.bytes(i).data(), value.mv_size);
      Require(mdb_txn_commit(transaction_));
    }
  }
  void Get(const ChunkSet& set, std::span<std::byte> into) override {
    Require(mdb_txn_begin(environment_, nullptr, MDB_RDONLY, &transaction_));
    for (int64_t i = 0; i < set.size(); ++i) {
      std::string name = set.name(i);
      MDB_val key{name.size(), name.data()};
      MDB_val value;
      Require(mdb_get(transaction_, database_, &key, &value));
      std::memcpy(into.data() + static_cast<size_t>(i) * value.mv_size, value.mv_data,
                  value.mv_size);
    }
    mdb_txn_abort(transaction_);
  }
  void Remove(const ChunkSet& set) override {
    Require(mdb_txn_begin(environment_, nullptr, 0, &transaction_));
    for (int64_t i = 0; i < set.size(); ++i) {
      std::string name = set.name(i);
      MDB_val key{name.size(), name.data()};
      Require(mdb_del(transaction_, database_, &key, nullptr));
    }
    Require(mdb_txn_commit(transaction_));
  }

 private:
  static void Require(int code) { Check(code == 0, std::string("LMDB: ") + mdb_strerror(code)); }

  MDB_env* environment_ = nullptr;
  MDB_txn* transaction_ = nullptr;
  MDB_dbi database_ = 0;
};
#endif

}  // namespace

std::vector<std::string> PeerPlaces() {
  std::vector<std::string> names;
#if QUIRE_BENCH_ROCKSDB
  names.push_back("rocksdb");
#endif
#if QUIRE_BENCH_LMDB
  names.push_back("lmdb");
#endif
  return names;
}

std::unique_ptr<ChunkPlace> MakePeerPlace([[maybe_unused]] const std::string& name,
                                          [[maybe_unused]] const PlaceRequest& request) {
#if QUIRE_BENCH_ROCKSDB
  if (name == "rocksdb") return std::make_unique<RocksPlace>(request);
#endif
#if QUIRE_BENCH_LMDB
  if (name == "lmdb") return std::make_unique<LmdbPlace>(request);
#endif
  return nullptr;
}

}  // namespace quire::bench
