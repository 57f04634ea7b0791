# Headers, library, CMake package and pkg-config file: find_package(opst CONFIG) gives opst::opst, as FetchContent and
# add_subdirectory do. scripts/check_consumer.sh tries all of it on examples/attention.

if(NOT OPST_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)

set(OPST_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/opst)
# Before 1.0 a minor version may change the API and the binary interface.
set_target_properties(opst PROPERTIES VERSION ${PROJECT_VERSION}
                                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

install(TARGETS opst EXPORT opst_targets)
install(DIRECTORY include/opst DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT opst_targets NAMESPACE opst:: DESTINATION ${OPST_CMAKE_DIR})

configure_package_config_file(cmake/opst-config.cmake.in opst-config.cmake INSTALL_DESTINATION ${OPST_CMAKE_DIR})
write_basic_package_version_file(opst-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/opst-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/opst-config-version.cmake
        DESTINATION ${OPST_CMAKE_DIR})

# Relative to the file itself, so that an installed tree may be moved.
file(RELATIVE_PATH OPST_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/opst.pc.in opst.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/opst.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
