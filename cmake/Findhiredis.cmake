# hiredis::hiredis: the Redis client as a static library, so that a wheel needs none on its machine; shared where there is no
# static one.
find_path(hiredis_INCLUDE_DIR hiredis/hiredis.h)
find_library(hiredis_LIBRARY NAMES libhiredis.a hiredis)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(hiredis REQUIRED_VARS hiredis_LIBRARY hiredis_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "Debian 12 has it as libhiredis-dev")
if(hiredis_FOUND AND NOT TARGET hiredis::hiredis)
  add_library(hiredis::hiredis UNKNOWN IMPORTED)
  set_target_properties(hiredis::hiredis PROPERTIES IMPORTED_LOCATION "${hiredis_LIBRARY}"
                                                    INTERFACE_INCLUDE_DIRECTORIES "${hiredis_INCLUDE_DIR}")
endif()
mark_as_advanced(hiredis_INCLUDE_DIR hiredis_LIBRARY)
